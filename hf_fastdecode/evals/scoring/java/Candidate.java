package evals;

import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;

/** Calls a method of a generated program with plain data; it never sees a test. */
final class Candidate {
    public static void main(String[] args) throws IOException {
        Messages messages = new Messages();
        messages.send(Messages.bytes("started"));
        byte[][] program = messages.receive();
        Method method = null;
        try {
            method = load(program);
            messages.send(Messages.bytes("ready"));
        } catch (Throwable error) {
            fail(messages, error);
        }
        for (;;) {
            List<?> values = (List<?>) Values.decode(messages.receive()[0]);
            try {
                messages.send(Messages.bytes("value"), Values.encode(method.invoke(null, values.toArray())));
            } catch (InvocationTargetException error) {
                fail(messages, error.getCause());
            } catch (Throwable error) {
                fail(messages, error);
            }
        }
    }

    /** The method, told by: class, method, parameter types, then names and contents of classes. */
    private static Method load(byte[][] program) throws ReflectiveOperationException {
        MemoryClasses classes = new MemoryClasses(program, 3);
        String name = Messages.text(program[1]);
        String parameters = Messages.text(program[2]);
        for (Method method : Class.forName(Messages.text(program[0]), true, classes).getDeclaredMethods()) {
            if (method.getName().equals(name) && parameters.equals(parameters(method))) {
                method.setAccessible(true);
                return method;
            }
        }
        throw new NoSuchMethodException(name);
    }

    private static String parameters(Method method) {
        return Arrays.stream(method.getParameterTypes()).map(Class::getSimpleName).collect(Collectors.joining(","));
    }

    private static void fail(Messages messages, Throwable error) throws IOException {
        String kind = error instanceof OutOfMemoryError ? "memory" : "error";
        messages.send(Messages.bytes(kind), Messages.bytes(error.toString()));
    }
}
