"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_gpt_neox import SlimGPTNeoXForCausalLM
from hf_fastdecode.patches.architectures.slim_gpt_neox import SlimGPTNeoXModel
from hf_fastdecode.patches.slim_configs import SlimGPTNeoXConfig
