"""The store in Redis or Valkey: standalone, Sentinel and Cluster."""
