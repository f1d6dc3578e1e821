"""What is known of models and upstreams: tokenizers, windows, calibration, prices."""
