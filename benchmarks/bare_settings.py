"""gunicorn's settings for the bare route: those of the service it is compared with."""

workers = 2
worker_class = "gthread"
threads = 64
keepalive = 0
loglevel = "error"
