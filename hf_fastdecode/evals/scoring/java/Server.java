package evals;

import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/**
 * Compiles programs and runs tests. The tests call a stand-in for the program's class, of which each call becomes a
 * message and each answer is plain data: code of a program never runs here.
 */
public final class Server {
    private static final Messages MESSAGES = new Messages();

    private final Compiler compiler = new Compiler();
    private String source = "";
    private byte[][] tests = {}; // compiled from it

    public static void main(String[] args) throws IOException {
        Server server = new Server();
        MESSAGES.send(Messages.bytes("started"));
        for (;;) {
            byte[][] request = MESSAGES.receive();
            String verb = Messages.text(request[0]);
            if (verb.equals("compile")) {
                server.compile(Messages.text(request[1]));
            } else {
                server.test(Messages.text(request[1]), request[2]);
            }
        }
    }

    /** What a stand-in's method does. */
    public static Object call(Object... values) {
        try {
            MESSAGES.send(Messages.bytes("call"), Values.encode(Arrays.asList(values)));
            byte[][] answer = MESSAGES.receive();
            if (Messages.text(answer[0]).equals("value")) {
                return Values.decode(answer[1]);
            }
            throw new IllegalStateException(Messages.text(answer[1]));
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    /** Sends the classes of a program with its tests, but for those of the tests. */
    private void compile(String source) throws IOException {
        List<byte[]> reply = new ArrayList<>();
        try {
            List<byte[]> classes = compiler.compile(source, "");
            reply.add(Messages.bytes("classes"));
            for (int i = 0; i < classes.size(); i += 2) {
                String name = Messages.text(classes.get(i));
                if (!name.equals("Main") && !name.startsWith("Main$")) {
                    reply.add(classes.get(i));
                    reply.add(classes.get(i + 1));
                }
            }
        } catch (Compiler.Rejected rejected) {
            reply = List.of(Messages.bytes("rejected"), Messages.bytes(rejected.getMessage()));
        } catch (OutOfMemoryError error) {
            reply = List.of(Messages.bytes("memory"), Messages.bytes(error.toString()));
        }
        MESSAGES.send(reply.toArray(new byte[0][]));
    }

    /** Runs tests, given with their stand-in, and sends the verdict; a pass is the nonce. */
    private void test(String withStandIn, byte[] nonce) throws IOException {
        String verdict;
        String detail;
        try {
            if (!source.equals(withStandIn)) {
                tests = compiler.compile(withStandIn, System.getProperty("java.class.path")).toArray(new byte[0][]);
                source = withStandIn;
            }
            Method main = new MemoryClasses(tests, 0).loadClass("Main").getMethod("main", String[].class);
            main.setAccessible(true);
            main.invoke(null, (Object) new String[0]);
            MESSAGES.send(Messages.bytes("pass"), new byte[0], nonce);
            return;
        } catch (InvocationTargetException error) {
            verdict = error.getCause() instanceof OutOfMemoryError ? "memory" : "fail";
            detail = String.valueOf(error.getCause());
        } catch (Exception error) {
            verdict = "broken";
            detail = String.valueOf(error);
        }
        MESSAGES.send(Messages.bytes(verdict), Messages.bytes(detail));
    }
}
