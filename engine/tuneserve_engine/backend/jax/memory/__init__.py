"""The plan of the device's memory, made before anything is loaded."""
