"""Settings for plain `gunicorn` in this directory. Values come from WARMSERVE_* (docs/OPERATIONS.md)."""

from server import hooks

settings = hooks.read_settings()

wsgi_app = "server.app:create_app"  # named for gunicorn; workers call it once their pool is warm
bind = settings.bind_addresses
workers = settings.workers
threads = settings.threads
worker_class = "server.worker.WarmWorker"
logger_class = settings.logger_class
timeout = 30
max_requests = settings.max_requests
max_requests_jitter = settings.max_requests_jitter
graceful_timeout = settings.drain_timeout_s
keepalive = 0  # a request on a kept connection would wait for its worker while another is idle
control_socket_disable = True  # it runs a thread in the master, and forks follow
on_starting = hooks.on_starting
