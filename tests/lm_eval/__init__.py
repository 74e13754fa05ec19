"""A small multiple-choice task that lm-eval scores through `/v1/completions`, and how to run it."""
