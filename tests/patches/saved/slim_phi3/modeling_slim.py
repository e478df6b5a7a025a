"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_phi3 import SlimPhi3ForCausalLM
from hf_fastdecode.patches.architectures.slim_phi3 import SlimPhi3Model
from hf_fastdecode.patches.slim_configs import SlimPhi3Config
