"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_gpt2 import SlimGPT2LMHeadModel
from hf_fastdecode.patches.architectures.slim_gpt2 import SlimGPT2Model
from hf_fastdecode.patches.slim_configs import SlimGPT2Config
