package simulate

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/klauspost/compress/zstd"
)

// Format is the format of a log.
type Format string

// The formats.
const (
	Auto     Format = "auto"     // found out from the first line that is not empty
	Combined Format = "combined" // an access log in the common or combined format of Apache httpd and nginx
	// time,key,cost: seconds since 1970 or RFC 3339; cost may be missing. A head line may name columns in another order
	CSV  Format = "csv"
	JSON Format = "json" // one event on a line: {"time":…,"key":…,"cost":…}
)

// LogConfig configures a Log.
type LogConfig struct {
	Format Format // empty stands for Auto
	// Field is the field of an access log that is the key: ip (or empty), user, method, path, status, referer or agent.
	Field string
	// Pattern, if not nil, finds the key in a line of any format: its first group, or the whole match.
	Pattern *regexp.Regexp
	// Name is the name of the log's file. A name that ends in .gz or .zst is decompressed.
	Name string
}

// mostLine is the length of the longest line in bytes; a longer one counts as malformed.
const mostLine = 64 << 10

// mostShown is how many malformed lines a report shows.
const mostShown = 5

// BadLine is a line that is not an event.
type BadLine struct {
	Number  int64  `json:"line"` // counted from 1
	Message string `json:"message"`
	Text    string `json:"text"` // the beginning of the line, quoted
}

// Log reads events from a log. It is not safe for concurrent use.
type Log struct {
	cfg    LogConfig
	lines  *bufio.Reader
	closer func()
	record bytes.Reader // the current line of CSV
	csv    *csv.Reader  // reads record

	number    int64
	malformed int64
	shown     []BadLine

	column struct{ time, key, cost, most int }
}

// NewLog returns a Log that reads from r. If r is no log, the error says what it is.
func NewLog(r io.Reader, cfg LogConfig) (*Log, error) {
	l := &Log{cfg: cfg, closer: func() {}}
	switch {
	case strings.HasSuffix(cfg.Name, ".gz"):
		z, err := gzip.NewReader(bufio.NewReaderSize(r, 1<<18))
		if err != nil {
			return nil, fmt.Errorf("not in the gzip format: %w", err)
		}
		r = z
	case strings.HasSuffix(cfg.Name, ".zst"):
		z, err := zstd.NewReader(r, zstd.WithDecoderMaxMemory(128<<20), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, fmt.Errorf("not in the zstd format: %w", err)
		}
		r, l.closer = z, z.Close
	}
	l.lines = bufio.NewReaderSize(r, mostLine)
	switch cfg.Field {
	case "", "ip", "user", "method", "path", "status", "referer", "agent":
	default:
		return nil, fmt.Errorf("field %q is not one of ip, user, method, path, status, referer and agent", cfg.Field)
	}
	head, err := l.lines.Peek(4096)
	if err != nil && err != io.EOF && !errors.Is(err, bufio.ErrBufferFull) {
		return nil, err
	}
	if bytes.IndexByte(head, 0) >= 0 {
		return nil, errors.New("is a binary file, not a log of lines; a compressed one must be named .gz or .zst")
	}
	first := bytes.TrimLeft(head, "\r\n \t")
	if i := bytes.IndexByte(first, '\n'); i >= 0 {
		first = first[:i]
	}
	if cmp.Or(l.cfg.Format, Auto) == Auto {
		l.cfg.Format = detect(first)
	}
	switch l.cfg.Format {
	case Combined, JSON:
	case CSV:
		l.columns(first)
	default:
		return nil, fmt.Errorf("format %q is not one of auto, combined, csv and json", l.cfg.Format)
	}
	return l, nil
}

// Close frees the memory of the decompression.
func (l *Log) Close() { l.closer() }

// Malformed returns how many lines were not events, and the first few of them.
func (l *Log) Malformed() (n int64, first []BadLine) { return l.malformed, l.shown }

func detect(line []byte) Format {
	switch {
	case len(line) > 0 && line[0] == '{':
		return JSON
	case bytes.IndexByte(line, '[') > 0 && bytes.IndexByte(line, '"') > 0:
		return Combined
	}
	return CSV
}

// columns reads the head line of a CSV file, if the first line is one. It is not an event.
func (l *Log) columns(first []byte) {
	l.csv = csv.NewReader(&l.record)
	l.csv.TrimLeadingSpace, l.csv.ReuseRecord, l.csv.FieldsPerRecord = true, true, -1
	l.column.time, l.column.key, l.column.cost, l.column.most = 0, 1, 2, 3
	names := strings.Split(strings.ToLower(string(bytes.TrimSpace(first))), ",")
	at := map[string]int{}
	for i, n := range names {
		at[strings.Trim(strings.TrimSpace(n), `"`)] = i
	}
	when, timed := at["time"]
	key, keyed := at["key"]
	if !timed || !keyed {
		return
	}
	l.column.time, l.column.key, l.column.most = when, key, len(names)
	l.column.cost = -1
	if cost, ok := at["cost"]; ok {
		l.column.cost = cost
	}
	for { // the head line is read as well
		line, err := l.line()
		if err != nil || len(bytes.TrimSpace(line)) > 0 {
			return
		}
	}
}

// Read returns the next event, and io.EOF after the last one. It counts malformed lines and leaves them out.
func (l *Log) Read(e *Event) error {
	for {
		line, err := l.line()
		if err != nil {
			return err
		}
		if len(line) == 0 {
			continue
		}
		e.Cost = 1
		var bad string
		switch l.cfg.Format {
		case Combined:
			bad = l.combined(line, e)
		case CSV:
			bad = l.fields(line, e)
		case JSON:
			bad = l.json(line, e)
		}
		if bad == "" && l.cfg.Pattern != nil {
			bad = l.match(line, e)
		}
		if bad == "" {
			bad = valid(e)
		}
		if bad == "" {
			return nil
		}
		l.bad(line, bad)
	}
}

// line returns the next line without its end.
func (l *Log) line() ([]byte, error) {
	for {
		line, err := l.lines.ReadSlice('\n')
		switch {
		case err == nil, err == io.EOF && len(line) > 0:
			l.number++
			return bytes.TrimRight(line, "\r\n"), nil
		case errors.Is(err, bufio.ErrBufferFull):
			l.number++
			l.bad(line, fmt.Sprintf("is longer than %d bytes", mostLine))
			for errors.Is(err, bufio.ErrBufferFull) {
				_, err = l.lines.ReadSlice('\n')
			}
			if err != nil {
				return nil, err
			}
		default:
			return nil, err
		}
	}
}

func (l *Log) bad(line []byte, message string) {
	l.malformed++
	if len(l.shown) < mostShown {
		l.shown = append(l.shown, BadLine{l.number, message, strconv.QuoteToASCII(string(line[:min(len(line), 80)]))})
	}
}

// mostKey is the length of the longest key of a node, in bytes.
const mostKey = 1024

func valid(e *Event) string {
	switch {
	case len(e.Key) == 0:
		return "has no key"
	case len(e.Key) > mostKey:
		return fmt.Sprintf("has a key of %d bytes, where a node takes %d at most", len(e.Key), mostKey)
	case e.Cost < 0:
		return "has a negative cost"
	case e.Cost > 1<<53:
		return "has a cost above 2^53"
	}
	return ""
}

func (l *Log) match(line []byte, e *Event) string {
	at := l.cfg.Pattern.FindSubmatchIndex(line)
	switch {
	case at == nil:
		return "does not match the key's regular expression"
	case len(at) > 2 && at[2] >= 0:
		e.Key = line[at[2]:at[3]]
	case len(at) > 2:
		return "has nothing in the first group of the key's regular expression"
	default:
		e.Key = line[at[0]:at[1]]
	}
	return ""
}

// combined parses a line such as
//
//	192.0.2.1 - alice [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.0" 200 2326 "http://example.com/" "curl/8"
//
// described at https://httpd.apache.org/docs/2.4/logs.html. Quotes within fields are written \".
func (l *Log) combined(line []byte, e *Event) string {
	open := bytes.IndexByte(line, '[')
	shut := bytes.IndexByte(line, ']')
	if open < 0 || shut < open {
		return "has no [time] of an access log"
	}
	t, err := time.Parse("02/Jan/2006:15:04:05 -0700", string(line[open+1:shut]))
	if e.At = t.UnixNano(); err != nil || !nanoseconds(t) {
		return "has a time that is not like 10/Oct/2000:13:55:36 -0700"
	}
	if l.cfg.Pattern != nil {
		return ""
	}
	// before the time: address, identity and user; after it: request, status and size, referer, agent
	space := []byte{' '}
	address, rest, spaced := bytes.Cut(line[:open], space)
	_, user, named := bytes.Cut(rest, space)
	parts, n := quoted(line[shut+1:])
	method, url, requested := bytes.Cut(parts[1], space)
	switch f := cmp.Or(l.cfg.Field, "ip"); {
	case f == "ip" && spaced:
		e.Key = address
	case f == "user" && named:
		e.Key = bytes.TrimSpace(user)
	case f == "method" && requested && n > 2:
		e.Key = method
	case f == "path" && requested && n > 2:
		url, _, _ = bytes.Cut(url, space)
		e.Key, _, _ = bytes.Cut(url, []byte{'?'})
	case f == "status" && n > 2:
		e.Key, _, _ = bytes.Cut(bytes.TrimLeft(parts[2], " "), space)
	case f == "referer" && n > 4:
		e.Key = parts[3]
	case f == "agent" && n > 6:
		e.Key = parts[5]
	default:
		return "has no " + f + ": it is not in the combined format"
	}
	return ""
}

// quoted splits a text at its quotes, so that what is in quotes has odd indexes. n is the number of parts, 7 at
// most.
func quoted(s []byte) (parts [7][]byte, n int) {
	for i := 0; i < len(s) && n < len(parts)-1; i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			parts[n], s = s[:i], s[i+1:]
			n, i = n+1, -1
		}
	}
	parts[n] = s
	return parts, n + 1
}

// nanoseconds reports whether t fits into 64 bits of nanoseconds.
func nanoseconds(t time.Time) bool { return t.Year() > 1700 && t.Year() < 2250 }

// fields parses a line of CSV.
func (l *Log) fields(line []byte, e *Event) string {
	l.record.Reset(line)
	fields, err := l.csv.Read()
	switch {
	case err != nil:
		return "has a quote that does not end, or is in the middle of a field"
	case len(fields) <= max(l.column.time, l.column.key):
		return "has fewer fields than time,key"
	case len(fields) > l.column.most:
		return fmt.Sprintf("has %d fields, expected at most %d: a key with commas must be in quotes", len(fields),
			l.column.most)
	}
	var ok bool
	if e.At, ok = parseTime(strings.TrimSpace(fields[l.column.time])); !ok {
		return "has a time that is neither seconds since 1970 nor RFC 3339"
	}
	e.Key = []byte(strings.TrimSpace(fields[l.column.key]))
	if i := l.column.cost; i >= 0 && i < len(fields) && fields[i] != "" {
		if e.Cost, err = strconv.ParseInt(strings.TrimSpace(fields[i]), 10, 64); err != nil {
			return "has a cost that is not a whole number"
		}
	}
	return ""
}

// parseTime parses seconds since 1970 with up to nine decimals, exactly, or an RFC 3339 time.
func parseTime(s string) (int64, bool) {
	if len(s) > 10 && s[4] == '-' {
		t, err := time.Parse(time.RFC3339Nano, s)
		return t.UnixNano(), err == nil && nanoseconds(t)
	}
	seconds, err := time.ParseDuration(s + "s")
	return int64(seconds), err == nil && strings.Trim(s, "-.0123456789") == ""
}

func (l *Log) json(line []byte, e *Event) string {
	var in struct {
		Time jsontext.Value `json:"time"`
		Key  string         `json:"key"`
		Cost *int64         `json:"cost"`
	}
	if err := json.Unmarshal(line, &in); err != nil {
		return "is not a JSON object with time, key and cost: " + shorten(err.Error())
	}
	var ok bool
	if e.At, ok = parseTime(strings.Trim(string(in.Time), `"`)); !ok {
		return "has a time that is neither seconds since 1970 nor RFC 3339"
	}
	if in.Cost != nil {
		e.Cost = *in.Cost
	}
	e.Key = []byte(in.Key)
	return ""
}

func shorten(s string) string { return s[:min(len(s), 120)] }
