package evals;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.net.URI;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import javax.tools.Diagnostic;
import javax.tools.DiagnosticCollector;
import javax.tools.FileObject;
import javax.tools.ForwardingJavaFileManager;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileManager;
import javax.tools.JavaFileObject;
import javax.tools.JavaFileObject.Kind;
import javax.tools.SimpleJavaFileObject;
import javax.tools.StandardJavaFileManager;
import javax.tools.ToolProvider;

/** Compiles one source text in memory. */
final class Compiler {
    private final JavaCompiler compiler = ToolProvider.getSystemJavaCompiler();
    private final StandardJavaFileManager files = compiler.getStandardFileManager(null, Locale.ROOT, null);

    /** What is wrong with a source text. */
    static final class Rejected extends Exception {
        Rejected(String message) {
            super(message);
        }
    }

    /** Names and contents of the classes, in turn. */
    List<byte[]> compile(String source, String classPath) throws Rejected {
        Map<String, ByteArrayOutputStream> classes = new TreeMap<>();
        DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
        List<String> options = List.of("-proc:none", "-nowarn", "-Xlint:none", "-g:none", "-classpath", classPath);
        boolean done;
        try {
            JavaFileManager memory = new Memory(files, classes);
            done = compiler.getTask(null, memory, found, options, null, List.of(new Source(source))).call();
        } catch (OutOfMemoryError error) {
            throw error; // whose memory it was is for others to find out
        } catch (Throwable error) { // of a compiler that the source was too much for
            throw new Rejected("the compiler fails: " + error);
        }
        if (!done) {
            for (Diagnostic<?> one : found.getDiagnostics()) {
                if (one.getKind() == Diagnostic.Kind.ERROR) {
                    throw new Rejected("line " + one.getLineNumber() + ": " + one.getMessage(Locale.ROOT));
                }
            }
            throw new Rejected("the compiler gives no reason");
        }
        List<byte[]> parts = new ArrayList<>();
        classes.forEach((name, content) -> {
            parts.add(Messages.bytes(name));
            parts.add(content.toByteArray());
        });
        return parts;
    }

    private static final class Source extends SimpleJavaFileObject {
        private final String text;

        Source(String text) {
            super(URI.create("memory:///Program.java"), Kind.SOURCE);
            this.text = text;
        }

        @Override
        public CharSequence getCharContent(boolean ignoreEncodingErrors) {
            return text;
        }

        @Override
        public boolean isNameCompatible(String simpleName, Kind kind) {
            return true; // a public class may stand in a text of any name, as MBXP's programs need
        }
    }

    private static final class Memory extends ForwardingJavaFileManager<JavaFileManager> {
        private final Map<String, ByteArrayOutputStream> classes;

        Memory(JavaFileManager files, Map<String, ByteArrayOutputStream> classes) {
            super(files);
            this.classes = classes;
        }

        @Override
        public JavaFileObject getJavaFileForOutput(Location location, String name, Kind kind, FileObject sibling)
                throws IOException {
            ByteArrayOutputStream content = new ByteArrayOutputStream();
            classes.put(name, content);
            return new SimpleJavaFileObject(URI.create("memory:///" + name.replace('.', '/') + ".class"), kind) {
                @Override
                public OutputStream openOutputStream() {
                    return content;
                }
            };
        }
    }
}
