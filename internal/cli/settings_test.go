package cli

import (
	"bytes"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// someFlags are flags of every type that there is.
func someFlags() (*pflag.FlagSet, func() map[string]any) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	port := fs.String("http-port", "8080", "")
	join := fs.StringSlice("join", nil, "")
	inline := fs.Bool("no-inline", false, "")
	timeout := fs.Duration("timeout", time.Second, "")
	ids := fs.Int("max-request-ids", 1000, "")
	fs.String("config", "", "")
	fs.Bool("help", false, "")
	return fs, func() map[string]any {
		return map[string]any{"http-port": *port, "join": strings.Join(*join, " "), "no-inline": *inline,
			"timeout": *timeout, "max-request-ids": *ids}
	}
}

func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

func TestFill(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		env  map[string]string
		file string
		want map[string]any // what differs from the defaults
	}{
		{name: "nothing"},
		{name: "file", file: "http-port: 1\njoin: [a:1, b:2]\nno-inline: true\ntimeout: 3s\nmax-request-ids: 4\n",
			want: map[string]any{"http-port": "1", "join": "a:1 b:2", "no-inline": true, "timeout": 3 * time.Second,
				"max-request-ids": 4}},
		{name: "environment before file", env: map[string]string{"WEIR_HTTP_PORT": "2", "WEIR_JOIN": "c:3,d:4"},
			file: "http-port: 1\njoin: [a:1]\ntimeout: 3s\n",
			want: map[string]any{"http-port": "2", "join": "c:3 d:4", "timeout": 3 * time.Second}},
		{name: "flag before both", args: []string{"--http-port=3"}, env: map[string]string{"WEIR_HTTP_PORT": "2"},
			file: "http-port: 1\n",
			want: map[string]any{"http-port": "3"}},
		{name: "a flag that says the default", args: []string{"--http-port=8080"},
			env: map[string]string{"WEIR_HTTP_PORT": "2"}},
		{name: "what a flag overrules need not be right", args: []string{"--timeout=2s"},
			env:  map[string]string{"WEIR_TIMEOUT": "soon"},
			want: map[string]any{"timeout": 2 * time.Second}},
		{name: "empty is a value", env: map[string]string{"WEIR_HTTP_PORT": ""}, want: map[string]any{"http-port": ""}},
		{name: "an empty text", file: "http-port: \"\"\n", want: map[string]any{"http-port": ""}},
		{name: "text list", file: "join: a:1,b:2\n", want: map[string]any{"join": "a:1 b:2"}},
		{name: "empty list", file: "join: []\n"},
		{name: "underscores", file: "http_port: 1\n", want: map[string]any{"http-port": "1"}},
		{name: "text in quotes", file: "http-port: \"1\"\n", want: map[string]any{"http-port": "1"}},
		{name: "empty file", file: ""},
		{name: "only a comment", file: "# nothing\n"},
		{name: "empty document", file: "---\n"},
		{name: "help is no setting", env: map[string]string{"WEIR_HELP": "what"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs, got := someFlags()
			want := got()
			maps.Copy(want, c.want)
			must.NoError(t, fs.Parse(append(c.args, "--config", testkit.WriteFile(t, "weir.yaml", c.file))))
			must.NoError(t, fillFlags(fs, lookup(c.env)))
			expect.True(t, maps.Equal(got(), want), "got  %v\nwant %v", got(), want)
		})
	}
}

func TestFillErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		env  map[string]string
		file string
		want []string // in the message, FILE standing for the file's name
	}{
		{"environment", map[string]string{"WEIR_TIMEOUT": "soon", "WEIR_NO_INLINE": "perhaps"}, "",
			[]string{"WEIR_TIMEOUT (environment): ", "WEIR_NO_INLINE (environment): "}},
		{"value", nil, "no-inline: true\ntimeout: soon\n", []string{"config: FILE:2:10: timeout: "}},
		{"unknown", nil, "http-port: 1\ncolour: red\nno-such: 1\n",
			[]string{"FILE:2:1: colour: unknown field", "FILE:3:1: no-such: unknown field"}},
		{"a file that names a file", nil, "config: other.yaml\n", []string{"FILE:1:1: config: unknown field"}},
		{"help", nil, "help: true\n", []string{"FILE:1:1: help: unknown field"}},
		{"twice", nil, "http-port: 1\nhttp_port: 2\n", []string{"FILE:2:1: http_port: is given twice"}},
		{"list for a single value", nil, "http-port: [1, 2]\n",
			[]string{"FILE:1:12: http-port: a single value is expected, not a list"}},
		{"list of lists", nil, "join: [[a:1]]\n", []string{"FILE:1:7: join: a list of texts"}},
		{"mapping", nil, "timeout: {a: b}\n", []string{"FILE:1:10: timeout: a single value is expected, not a map"}},
		{"no value", nil, "http-port:\njoin: null\n",
			[]string{"FILE:1:1: http-port: has no value", "FILE:2:1: join: has no value"}},
		{"null for a duration", nil, "timeout: ~\n", []string{"FILE:1:1: timeout: has no value"}},
		{"list of settings", nil, "- http-port: 1\n", []string{"FILE:1:1: must be a map of fields"}},
		{"not YAML", nil, "http-port: [\n", []string{"config: FILE:2:1: is not valid YAML"}},
		{"two documents", nil, "http-port: 1\n---\ntimeout: 1s\n",
			[]string{"FILE:2:1: a second YAML document begins here"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs, _ := someFlags()
			file := testkit.WriteFile(t, "weir.yaml", c.file)
			must.NoError(t, fs.Parse([]string{"--config", file}))
			err := fillFlags(fs, lookup(c.env))
			must.True(t, err != nil, "no error")
			for _, want := range c.want {
				want = strings.ReplaceAll(want, "FILE", file)
				expect.True(t, strings.Contains(err.Error(), want), "lacks %q: %v", want, err)
			}
		})
	}
	fs, _ := someFlags()
	err := fillFlags(fs, lookup(map[string]string{"WEIR_CONFIG": "/none"}))
	expect.True(t, err != nil && strings.HasPrefix(err.Error(), "config: "), "a file that is not there: %v", err)
}

func TestUnknown(t *testing.T) {
	fs, _ := someFlags()
	got := unknownVariables(fs, []string{"PATH=/bin", "WEIR_HTTP_PORT=1", "WEIR_HTP_PORT=1", "WEIRD=1", "WEIR_=x"})
	want := []string{"WEIR_HTP_PORT", "WEIR_"}
	expect.True(t, slices.Equal(got, want), "%q, want %q", got, want)
}

// FuzzConfig: whatever a file of settings holds, the flags are set by it or an error says where it is wrong.
func FuzzConfig(f *testing.F) {
	for _, text := range []string{
		"", "http-port: 8080\njoin: [a:1, b:2]\n", "max-memory: 70%\ntimeout: 1s\n", "a: &a [*a]\n", "? [",
		"join: {a: b}", "http_port: ~",
		"join: &x [a]\nvoters: *x\n", "--- 1\n--- 2\n", "null", "\xff", "help: true\nconfig: x\n",
		"trace-sample: .nan\n", "no-inline: yes\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		flags, _ := someFlags()
		if err := fillFromYAML(flags, "file", data); err != nil {
			for line := range strings.Lines(err.Error()) {
				must.True(t, strings.HasPrefix(line, "config: file") || strings.HasPrefix(line, " "),
					"%q does not say where", line)
			}
		}
	})
}

// TestCommandsWithPipes: no command waits for a pipe that it is given in the place of a file.
func TestCommandsWithPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	must.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, args := range [][]string{
		{"validate", pipe},
		{"run", "--config", pipe},
		{"run", "--policies", pipe, "--http-port", "0", "--grpc-port", "0", "--gossip-port", "", "--peer-port", ""},
		{"run", "--cluster-secret-file", pipe, "--http-port", "0", "--grpc-port", "0", "--gossip-port", "",
			"--peer-port", ""},
		{"run", "--access-file", pipe},
		{"run", "--gossip-key-file", pipe},
		{"run", "--tls-cert-file", pipe, "--tls-key-file", pipe},
		{"dev", "--policies", pipe, "--nodes", "1"},
		{"status", "--token-file", pipe},
		{"status", "--tls-ca-file", pipe},
		{"status", "--tls-cert-file", pipe, "--tls-key-file", pipe},
		{"gossip-keys", "add", pipe},
	} {
		var out, errs bytes.Buffer
		code := run(args, &out, &errs)
		expect.True(t, code == exitError && strings.Contains(errs.String(), "not a regular file: its mode is prw"),
			"%s: exit status %d, %s", args, code, errs.String())
	}
}
