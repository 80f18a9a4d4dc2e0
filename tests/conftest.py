"""Without a GPU the kernels run in Triton's interpreter: to be asked for before the import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
