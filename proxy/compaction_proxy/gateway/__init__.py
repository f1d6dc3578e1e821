"""The part of the proxy that receives HTTP requests (ASGI), relays them to the upstream and answers them."""
