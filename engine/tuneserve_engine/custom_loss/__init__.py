"""Custom losses: a client's traced torch function, evaluated and differentiated by NumPy."""
