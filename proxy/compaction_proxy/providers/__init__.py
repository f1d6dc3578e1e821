"""Facts about models and upstreams: tokenizers, context windows, calibration and prices."""
