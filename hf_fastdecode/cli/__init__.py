"""The commands of hf-fastdecode: functions that return dataclasses, and the code that shows those."""
