"""The Metal sources on the CPU: an emulator of torch.mps.compile_shader, a lint, and their tests."""
