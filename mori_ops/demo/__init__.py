"""The main job on real input: `python -m mori_ops.demo`."""
