"""The commands of ``hf-fastdecode eval``."""
