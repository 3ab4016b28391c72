"""The ops inside other libraries' models."""
