"""GPUs for which a plan can be made, and programs compiled, without one."""

GPU_MIB = {
    "h200": 143_771,
    "h100": 81_559,
    "a100": 81_920,
    "a100-40gb": 40_960,
    "l40s": 46_068,
    "rtx-4090": 24_564,
}
"""Each GPU's memory in MiB, as its driver reports it."""
DEVICE_KINDS = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3", "l40s": "NVIDIA L40S"}
"""The GPUs that can be compiled for, and the names that their driver gives them."""
DRIVERS = {"570": "12.8.0", "575": "12.9.0", "580": "13.0.0"}
"""Branches of NVIDIA's driver, and the CUDA that each has."""
