"""nginx as the plainest relay there is: one worker, connections kept on both sides, no buffering, no log."""

from pathlib import Path

_NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log stderr error;
events {{ worker_connections 16384; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream provider {{
        server {upstream};
        keepalive 2048;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        client_max_body_size 0;
        client_body_buffer_size 256k;
        location / {{
            proxy_pass http://provider;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_next_upstream off;
        }}
    }}
}}
"""


def command(program: str, folder: Path, upstream: tuple[str, int], port: int) -> list[str]:
    """How to run nginx; writes its configuration into the folder."""
    where = "{}:{}".format(*upstream)
    settings = folder / "nginx.conf"
    settings.write_text(_NGINX.format(folder=folder, upstream=where, port=port))
    return [program, "-p", str(folder), "-e", "stderr", "-c", str(settings)]
