"""The main job on real input: train a small GPT with torch's attention, swap in ours, compare, and watch the memory."""
