"""GPUs that tests plan for and do not have."""

from __future__ import annotations

from flashattn_lite.target import Target

H200 = Target("cuda", 90, "sm_90", multiprocessors=132)  # an H100 has as many
OTHERS = {
    "A100": Target("cuda", 80, "sm_80", multiprocessors=108),
    "B200": Target("cuda", 100, "sm_100", multiprocessors=148),
    "MI300X": Target("hip", "gfx942", "gfx942", multiprocessors=304),
}
