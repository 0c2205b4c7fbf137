"""GPUs for which a plan can be made without one."""

GPU_MIB = {
    "h200": 143_771,
    "h100": 81_559,
    "a100": 81_920,
    "a100-40gb": 40_960,
    "l40s": 46_068,
    "rtx-4090": 24_564,
}
"""Each GPU's memory in MiB, as its driver reports it."""
