"""Ops of the forward pass: one signature each, several bodies. Call them through `kernels.ops`."""
