package evals;

import java.util.HashMap;
import java.util.Map;

/** Loads classes from memory. */
final class MemoryClasses extends ClassLoader {
    private final Map<String, byte[]> contents = new HashMap<>();

    /** Names and contents in turn, from an index on. */
    MemoryClasses(byte[][] parts, int from) {
        for (int i = from; i + 1 < parts.length; i += 2) {
            contents.put(Messages.text(parts[i]), parts[i + 1]);
        }
    }

    @Override
    protected Class<?> findClass(String name) throws ClassNotFoundException {
        byte[] content = contents.get(name);
        if (content == null) {
            throw new ClassNotFoundException(name);
        }
        return defineClass(name, content, 0, content.length);
    }
}
