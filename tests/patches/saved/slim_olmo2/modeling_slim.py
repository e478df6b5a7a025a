"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_olmo2 import SlimOlmo2ForCausalLM
from hf_fastdecode.patches.architectures.slim_olmo2 import SlimOlmo2Model
from hf_fastdecode.patches.slim_configs import SlimOlmo2Config
