"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""

from hf_fastdecode.patches.architectures.slim_bart import SlimBartForConditionalGeneration
from hf_fastdecode.patches.architectures.slim_bart import SlimBartModel
from hf_fastdecode.patches.encoder_decoder_configs import SlimBartConfig
