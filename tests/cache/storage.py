"""What caches hold in memory."""


def held(*caches):
    """Bytes of the distinct storages that keys and values of caches lie in."""
    segments = [segment for cache in caches for layer in cache.layers for segment in layer.storage.segments.values()]
    suffixes = [layer.storage.suffix for cache in caches for layer in cache.layers if layer.storage.suffix is not None]
    storages = [part.untyped_storage() for pair in segments + suffixes for part in pair]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
