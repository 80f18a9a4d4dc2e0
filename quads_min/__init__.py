"""quads_min: NVFP4 reinforcement learning for MoE models, small enough to read in one sitting.

Reading order: nvfp4.py (the format), model.py (the policy), qat.py (the trainer's side), modes.py
(the table of modes), tasks.py and grpo.py (the task and the objective), then rollout.py (the
engine), kernels.py (its GEMMs in Triton) and train.py (one RL step, in order) at the root of the
repository; checkpoint.py, runs.py and report.py hold the files: weights, a run's folder, tables and
figures; analysis.py and claims.py say what came out.

Letters in shape comments: B sequences = prompts * G, P prompt tokens, T tokens, D width, H heads,
E experts, F expert width, V vocabulary, L layers; slots S = T * top_k. GEMM: x (M, K), w (N, K),
y = x @ w.T (M, N); expert weights (E, N, K).
"""
