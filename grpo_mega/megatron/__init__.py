"""The policy on Megatron-core; the only package that imports `megatron`.

Importing any module of it first installs the patches of compat.py, since Megatron reads parts of torch.cuda at import
time.
"""

from grpo_mega.megatron import compat

compat.install_patches()
