"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_codegen import SlimCodeGenForCausalLM
from hf_fastdecode.patches.architectures.slim_codegen import SlimCodeGenModel
from hf_fastdecode.patches.slim_configs import SlimCodeGenConfig
