"""Activation offload: what autograd keeps for backward leaves for a part of the host budget, and for NVMe."""
