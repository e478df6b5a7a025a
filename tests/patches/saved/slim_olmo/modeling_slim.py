"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_olmo import SlimOlmoForCausalLM
from hf_fastdecode.patches.architectures.slim_olmo import SlimOlmoModel
from hf_fastdecode.patches.slim_configs import SlimOlmoConfig
