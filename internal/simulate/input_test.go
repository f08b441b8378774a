package simulate

import (
	"bytes"
	"compress/gzip"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

type read struct {
	at   int64
	key  string
	cost int64
}

func readAll(t *testing.T, in io.Reader, cfg LogConfig) ([]read, *Log) {
	t.Helper()
	l := must.Value(NewLog(in, cfg))(t)
	defer l.Close()
	var all []read
	for {
		var e Event
		switch err := l.Read(&e); err {
		case nil:
			all = append(all, read{e.At, string(e.Key), e.Cost})
		case io.EOF:
			return all, l
		default:
			t.Fatal(err)
		}
	}
}

const access = `192.0.2.1 - alice smith [10/Oct/2000:13:55:36 -0700] "GET /a?x=1 HTTP/1.0" 200 2326 "http://e.com/\"x\"" "curl/8 (x)"
2001:db8::1 - - [10/Oct/2000:13:55:37 -0700] "POST /b HTTP/2.0" 429 0 "-" "wrk"
nothing
192.0.2.1 - - [10/Nix/2000:13:55:38 -0700] "GET /c HTTP/1.1" 200 1
`

func TestLogs(t *testing.T) {
	at := time.Date(2000, 10, 10, 20, 55, 36, 0, time.UTC).UnixNano()
	for name, c := range map[string]struct {
		cfg       LogConfig
		text      string
		want      []read
		format    Format
		malformed string // the first message
		bad       int64
	}{
		"combined": {LogConfig{}, access, []read{{at, "192.0.2.1", 1}, {at + 1e9, "2001:db8::1", 1}}, Combined,
			"has no [time]", 2},
		"user": {LogConfig{Field: "user"}, access, []read{{at, "alice smith", 1}, {at + 1e9, "-", 1}}, Combined,
			"has no [time]", 2},
		"method": {LogConfig{Field: "method"}, access, []read{{at, "GET", 1}, {at + 1e9, "POST", 1}}, Combined,
			"has no [time]", 2},
		"path": {LogConfig{Field: "path"}, access, []read{{at, "/a", 1}, {at + 1e9, "/b", 1}}, Combined,
			"has no [time]", 2},
		"status": {LogConfig{Field: "status"}, access, []read{{at, "200", 1}, {at + 1e9, "429", 1}}, Combined,
			"has no [time]", 2},
		"referer": {LogConfig{Field: "referer"}, access, []read{{at, `http://e.com/\"x\"`, 1}, {at + 1e9, "-", 1}},
			Combined, "has no [time]", 2},
		"agent": {LogConfig{Field: "agent"}, access, []read{{at, "curl/8 (x)", 1}, {at + 1e9, "wrk", 1}},
			Combined, "has no [time]", 2},
		"pattern": {LogConfig{Pattern: regexp.MustCompile(`"(\w+) /(.)`)}, access,
			[]read{{at, "GET", 1}, {at + 1e9, "POST", 1}}, Combined, "has no [time]", 2},
		"csv": {LogConfig{}, "1700000000.123456789,a,2\n1700000001,b\n1700000002.5,c,\n",
			[]read{{1700000000123456789, "a", 2}, {1700000001e9, "b", 1}, {17000000025e8, "c", 1}}, CSV, "", 0},
		"csv times": {LogConfig{}, "2000-10-10T20:55:36Z,a\n2000-10-10T13:55:36.000000001-07:00,b\n-1.5,c\n",
			[]read{{at, "a", 1}, {at + 1, "b", 1}, {-15e8, "c", 1}}, CSV, "", 0},
		"csv quotes": {LogConfig{Format: CSV}, "1,\"a,\"\"b\"\"\",3\n2,\"x\n3,y\n",
			[]read{{1e9, `a,"b"`, 3}, {3e9, "y", 1}}, CSV, "has a quote", 1},
		"csv head":    {LogConfig{}, "\ncost, key ,time,other\r\n4,k,5,x\r\n", []read{{5e9, "k", 4}}, CSV, "", 0},
		"csv no cost": {LogConfig{}, "key,time\nk,5\n", []read{{5e9, "k", 1}}, CSV, "", 0},
		"csv mistakes": {LogConfig{Format: CSV},
			"x,k\n1\n1,k,1.5\n1,k,-1\n1,,1\n1,k,1,1\n99999999999,k\n1.x,k\n9999999999,k\n1,k,9007199254740993\n,k\n",
			nil, CSV, "has a time", 11},
		"json": {LogConfig{},
			"{\"time\":1.5,\"key\":\"ä\",\"cost\":0}\n\n{\"key\":\"b\",\"time\":\"2000-10-10T20:55:36Z\"}\n{\"time\":\"7\",\"key\":\"c\"}\n", []read{{15e8, "ä", 0}, {at, "b", 1}, {7e9, "c", 1}}, JSON, "", 0},
		"json bad": {LogConfig{Format: JSON},
			"{\"time\":1,\"key\":5}\n[]\n{\"time\":{},\"key\":\"k\"}\n{\"key\":\"k\"}\n{\"time\":1,\"key\":\"\"}\n{\"time\":1,\"key\":\"a\",\"key\":\"b\"}\n", nil, JSON, "is not a JSON object", 6},
		"empty": {LogConfig{}, "", nil, CSV, "", 0},
		"long": {LogConfig{Format: CSV}, strings.Repeat("x", 3*mostLine) + "\n1,k\n2," + strings.Repeat("k",
			mostKey+1) + "\n3,l", []read{{1e9, "k", 1}, {3e9, "l", 1}}, CSV, "is longer", 2},
		"long end": {LogConfig{Format: CSV}, strings.Repeat("x", mostLine+1), nil, CSV, "is longer", 1},
	} {
		t.Run(name, func(t *testing.T) {
			pack := map[string]func(io.Writer) io.WriteCloser{
				"":     nil,
				".gz":  func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
				".zst": func(w io.Writer) io.WriteCloser { z, _ := zstd.NewWriter(w); return z },
			}
			for ending, packer := range pack {
				var in bytes.Buffer
				if packer == nil {
					in.WriteString(c.text)
				} else {
					w := packer(&in)
					io.WriteString(w, c.text)
					w.Close()
				}
				cfg := c.cfg
				cfg.Name = "log" + ending
				got, l := readAll(t, &in, cfg)
				must.Equal(t, len(got), len(c.want), "%q: %+v, want %+v", ending, got, c.want)
				for i := range got {
					expect.Equal(t, got[i], c.want[i], "%q: event %d", ending, i)
				}
				n, first := l.Malformed()
				expect.True(t, l.cfg.Format == c.format && n == c.bad && len(first) == int(min(n, mostShown)) &&
					(n <= 0 || strings.HasPrefix(first[0].Message, c.malformed)),
					"%q: format %s, %d malformed: %+v", ending, l.cfg.Format, n, first)
			}
		})
	}
}

func TestNoLogs(t *testing.T) {
	for want, c := range map[string]struct {
		text string
		cfg  LogConfig
	}{
		"binary":       {"\x7fELF\x00\x00", LogConfig{}},
		"gzip":         {"time,key\n", LogConfig{Name: "x.gz"}},
		"field \"x\"":  {"", LogConfig{Field: "x"}},
		"format \"x\"": {"", LogConfig{Format: "x"}},
	} {
		_, err := NewLog(strings.NewReader(c.text), c.cfg)
		expect.True(t, err != nil && strings.Contains(err.Error(), want), "%s: %v", want, err)
	}
	// What is cut off in the middle is an error, not the end.
	var in bytes.Buffer
	w := gzip.NewWriter(&in)
	io.WriteString(w, strings.Repeat("1,k\n", 1000))
	w.Close()
	l, err := NewLog(bytes.NewReader(in.Bytes()[:in.Len()-4]), LogConfig{Name: "x.gz"})
	if err != nil {
		return // told at once
	}
	var e Event
	for err == nil {
		err = l.Read(&e)
	}
	expect.Equal(t, err, io.ErrUnexpectedEOF, "a log cut off")
}

func FuzzLog(f *testing.F) {
	f.Add(access, false)
	f.Add("time,key,cost\n1,a,2\n\"1\",\"\"\"\",3\n", false)
	f.Add("{\"time\":1e3,\"key\":\"a\"}\n{\"time\":\"\\u0031\",\"key\":\"\\ud800\"}", true)
	f.Fuzz(func(t *testing.T, text string, pattern bool) {
		for _, format := range []Format{Auto, Combined, CSV, JSON} {
			for _, field := range []string{"ip", "user", "path", "status", "agent"} {
				cfg := LogConfig{Format: format, Field: field}
				if pattern {
					cfg.Pattern = regexp.MustCompile(`k(.*)e|x`)
				}
				l, err := NewLog(strings.NewReader(text), cfg)
				if err != nil {
					continue
				}
				var e Event
				events := int64(0)
				for l.Read(&e) == nil {
					events++
					must.True(t, len(e.Key) != 0 && len(e.Key) <= mostKey && e.Cost >= 0, "%+v", e)
				}
				bad, shown := l.Malformed()
				if lines := int64(strings.Count(text, "\n")) + 1; events+bad > lines || int64(len(shown)) > bad {
					t.Fatalf("%d events and %d malformed in %d lines", events, bad, lines)
				}
			}
		}
	})
}
