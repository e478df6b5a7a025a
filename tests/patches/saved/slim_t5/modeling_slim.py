"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_t5 import SlimT5ForConditionalGeneration
from hf_fastdecode.patches.architectures.slim_t5 import SlimT5Model
from hf_fastdecode.patches.encoder_decoder_configs import SlimT5Config
