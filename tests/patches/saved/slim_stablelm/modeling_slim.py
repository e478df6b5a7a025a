"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_stablelm import SlimStableLmForCausalLM
from hf_fastdecode.patches.architectures.slim_stablelm import SlimStableLmModel
from hf_fastdecode.patches.slim_configs import SlimStableLmConfig
