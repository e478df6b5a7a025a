"""Which `generate` calls run with shared context, and why others run stock: by model, call and prompts."""
