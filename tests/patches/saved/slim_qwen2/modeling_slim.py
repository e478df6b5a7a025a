"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_qwen2 import SlimQwen2ForCausalLM
from hf_fastdecode.patches.architectures.slim_qwen2 import SlimQwen2Model
from hf_fastdecode.patches.slim_configs import SlimQwen2Config
