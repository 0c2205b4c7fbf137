"""The checks of requests and their conversion into the commands of jobs."""
