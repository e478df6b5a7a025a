package evals;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.LinkedList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.SortedMap;
import java.util.SortedSet;
import java.util.TreeMap;
import java.util.TreeSet;

/**
 * Values of Java's own classes as bytes. An object of another class has no such form, whatever its equals() says; a
 * collection becomes one of java.util with the same items.
 */
final class Values {
    private static final int DEEPEST = 500;

    static byte[] encode(Object value) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        write(value, new DataOutputStream(bytes), 0);
        return bytes.toByteArray();
    }

    static Object decode(byte[] bytes) throws IOException {
        return read(new DataInputStream(new ByteArrayInputStream(bytes)), 0);
    }

    private static void write(Object value, DataOutputStream out, int depth) throws IOException {
        check(depth);
        if (value == null) {
            out.writeByte('0');
        } else if (value instanceof Boolean) {
            out.writeByte('b');
            out.writeBoolean((Boolean) value);
        } else if (value instanceof Integer) {
            out.writeByte('i');
            out.writeInt((Integer) value);
        } else if (value instanceof Long) {
            out.writeByte('l');
            out.writeLong((Long) value);
        } else if (value instanceof Double) {
            out.writeByte('d');
            out.writeDouble((Double) value);
        } else if (value instanceof Float) {
            out.writeByte('f');
            out.writeFloat((Float) value);
        } else if (value instanceof Short) {
            out.writeByte('h');
            out.writeShort((Short) value);
        } else if (value instanceof Byte) {
            out.writeByte('y');
            out.writeByte((Byte) value);
        } else if (value instanceof Character) {
            out.writeByte('c');
            out.writeChar((Character) value);
        } else if (value instanceof String) {
            text('s', (String) value, out);
        } else if (value.getClass() == BigInteger.class) {
            text('I', value.toString(), out);
        } else if (value.getClass() == BigDecimal.class) {
            text('D', value.toString(), out);
        } else if (value instanceof List) {
            boolean fixed = value.getClass() == Arrays.asList().getClass();
            items(fixed ? 'F' : value instanceof LinkedList ? 'K' : 'L', (List<?>) value, out, depth);
        } else if (value instanceof Set) {
            char kind = value instanceof SortedSet ? 'T' : value instanceof LinkedHashSet ? 'O' : 'S';
            items(kind, (Set<?>) value, out, depth);
        } else if (value instanceof Map) {
            char kind = value instanceof SortedMap ? 'R' : value instanceof LinkedHashMap ? 'Q' : 'M';
            List<Object> entries = new ArrayList<>();
            for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                entries.add(entry.getKey());
                entries.add(entry.getValue());
            }
            items(kind, entries, out, depth);
        } else {
            throw new IllegalArgumentException("an object of " + value.getClass().getName() + " is no plain data");
        }
    }

    private static void text(char kind, String text, DataOutputStream out) throws IOException {
        out.writeByte(kind);
        out.writeInt(text.length());
        out.writeChars(text); // half of a surrogate pair has no UTF-8
    }

    private static void items(char kind, Collection<?> items, DataOutputStream out, int depth) throws IOException {
        Object[] all = items.toArray();
        out.writeByte(kind);
        out.writeInt(all.length);
        for (Object item : all) {
            write(item, out, depth + 1);
        }
    }

    private static Object read(DataInputStream in, int depth) throws IOException {
        check(depth);
        char kind = (char) in.readByte();
        switch (kind) {
            case '0':
                return null;
            case 'b':
                return in.readBoolean();
            case 'i':
                return in.readInt();
            case 'l':
                return in.readLong();
            case 'd':
                return in.readDouble();
            case 'f':
                return in.readFloat();
            case 'h':
                return in.readShort();
            case 'y':
                return in.readByte();
            case 'c':
                return in.readChar();
            case 's':
                return text(in);
            case 'I':
                return new BigInteger(text(in));
            case 'D':
                return new BigDecimal(text(in));
            default:
                return collection(kind, in, depth);
        }
    }

    private static Object collection(char kind, DataInputStream in, int depth) throws IOException {
        Object[] items = new Object[counted(in, 1)];
        for (int i = 0; i < items.length; i++) {
            items[i] = read(in, depth + 1);
        }
        List<Object> list = Arrays.asList(items);
        switch (kind) {
            case 'F':
                return list;
            case 'L':
                return new ArrayList<>(list);
            case 'K':
                return new LinkedList<>(list);
            case 'S':
                return filled(new HashSet<>(), list);
            case 'O':
                return filled(new LinkedHashSet<>(), list);
            case 'T':
                return filled(new TreeSet<>(), list);
            case 'M':
                return filled(new HashMap<>(), items);
            case 'Q':
                return filled(new LinkedHashMap<>(), items);
            case 'R':
                return filled(new TreeMap<>(), items);
            default:
                throw new IOException("not a value");
        }
    }

    private static Set<Object> filled(Set<Object> set, List<Object> items) {
        set.addAll(items);
        return set;
    }

    private static Map<Object, Object> filled(Map<Object, Object> map, Object[] items) {
        for (int i = 0; i + 1 < items.length; i += 2) {
            map.put(items[i], items[i + 1]);
        }
        return map;
    }

    private static String text(DataInputStream in) throws IOException {
        char[] letters = new char[counted(in, 2)];
        for (int i = 0; i < letters.length; i++) {
            letters[i] = in.readChar();
        }
        return new String(letters).intern(); // as the literals of the tests: some programs compare with ==
    }

    /** A number of items of at least so many bytes each; no more than are there. */
    private static int counted(DataInputStream in, int size) throws IOException {
        int count = in.readInt();
        if (count < 0 || count > in.available() / size) {
            throw new IOException("not a value");
        }
        return count;
    }

    private static void check(int depth) {
        if (depth > DEEPEST) {
            throw new IllegalArgumentException("a value of more than " + DEEPEST + " levels");
        }
    }
}
