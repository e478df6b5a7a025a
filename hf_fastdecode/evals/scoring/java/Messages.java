package evals;

import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/** Messages over standard input and output: lists of byte strings. */
final class Messages {
    private final DataInputStream in = new DataInputStream(new BufferedInputStream(new FileInputStream(FileDescriptor.in)));
    private final DataOutputStream out =
            new DataOutputStream(new BufferedOutputStream(new FileOutputStream(FileDescriptor.out)));

    /** From here on, what is printed is dropped, and nothing else can be read. */
    Messages() {
        System.setOut(new PrintStream(OutputStream.nullOutputStream()));
        System.setErr(new PrintStream(OutputStream.nullOutputStream()));
        System.setIn(InputStream.nullInputStream());
    }

    byte[][] receive() throws IOException {
        byte[][] parts = new byte[in.readInt()][];
        for (int i = 0; i < parts.length; i++) {
            parts[i] = in.readNBytes(in.readInt());
        }
        return parts;
    }

    void send(byte[]... parts) throws IOException {
        out.writeInt(parts.length);
        for (byte[] part : parts) {
            out.writeInt(part.length);
            out.write(part);
        }
        out.flush();
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] bytes) {
        return new String(bytes, StandardCharsets.UTF_8);
    }
}
