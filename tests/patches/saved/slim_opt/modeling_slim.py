"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_opt import SlimOPTForCausalLM
from hf_fastdecode.patches.architectures.slim_opt import SlimOPTModel
from hf_fastdecode.patches.slim_configs import SlimOPTConfig
