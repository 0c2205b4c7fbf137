"""The seam to the device: NumPy in, NumPy out."""
