"""GPUs that tests plan for and do not have."""

from __future__ import annotations

from flashattn_lite.target import Target

H200 = Target("cuda", 90, "sm_90", multiprocessors=132)  # an H100 has as many
