"""HTTP below the routes: connections, bodies, long polls, metrics."""
