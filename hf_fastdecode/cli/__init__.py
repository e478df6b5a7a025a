"""What the commands of hf-fastdecode do: functions that return dataclasses, and the code that shows those."""
