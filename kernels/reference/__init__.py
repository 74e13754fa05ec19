"""Bodies in plain torch: obvious, slow, the oracle of the others."""
