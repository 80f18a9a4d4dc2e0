"""quads_min: NVFP4 reinforcement learning for MoE models, small enough to read in an afternoon.

Reading order, as each docstring's end says: train.py (one RL step, in order), rollout.py (the
engine), kernels.py (its GEMMs in Triton) at the root of the repository; here nvfp4.py (the format),
model.py (the policy), qat.py (the trainer's side), modes.py (the table of modes), grpo.py and
tasks.py (objective and task); checkpoint.py, runs.py and report.py hold the files: weights, a run's
folder, tables and figures; analysis.py says where the gap comes from.

Letters in shape comments: B sequences = prompts * G, P prompt tokens, N new tokens, T tokens, D
width, H heads, E experts, F expert width, L layers. In a GEMM, and everywhere in kernels.py: x
(M, K), w (N, K), y = x @ w.T (M, N); expert weights (E, N, K). No sizes: V, an expert's weight as
it is quantized, W / o (model.py); S and g, encode scale and global scale of a row (nvfp4.py).
"""
