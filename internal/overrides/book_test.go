package overrides

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func mustOpen(t testing.TB, name string) *Book {
	t.Helper()
	b, err := OpenBook(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func set(t testing.TB, b *Book, node, key, settings string) Entry {
	t.Helper()
	e, _, err := b.Change(node, Entry{ID: ID{Policy: "login", Key: key}, Settings: settings, By: "ops", At: time.UnixMilli(1000)})
	if err != nil || e == nil {
		t.Fatalf("change of %q: %v %v", key, e, err)
	}
	return *e
}

// epoch is a time that an entry may have, as the zero Time is not.
var epoch = time.UnixMilli(0).UTC()

func contentOf(b *Book) (all []Entry) {
	for _, e := range b.sorted() {
		all = append(all, *e)
	}
	return all
}

// TestBook: what was changed is there, also after the file was read again, and a deletion is remembered.
func TestBook(t *testing.T) {
	name := filepath.Join(t.TempDir(), FileName)
	b := mustOpen(t, name)
	if b.Digest() != (Digest{}) || !b.Durable() {
		t.Error("an empty book")
	}
	set(t, b, "n0", "alice", `{"limit":1}`)
	if e := set(t, b, "n0", "alice", `{"limit":2}`); e.Version != (Version{2, "n0"}) {
		t.Errorf("version %v", e.Version)
	}
	hostile := "new\nline \x00 \U0001F600 \u2028\"\\"
	set(t, b, "n0", hostile, `{"unlimited":true}`)
	set(t, b, "n0", "bob", `{"limit":3}`)
	now, before, err := b.Change("n0", Entry{ID: ID{Policy: "login", Key: "bob"}, At: epoch})
	if err != nil || !now.Deleted() || before.Settings != `{"limit":3}` {
		t.Errorf("deletion: %+v %+v %v", now, before, err)
	}
	for _, key := range []string{"bob", "nobody"} {
		if now, before, err := b.Change("n0", Entry{ID: ID{Policy: "login", Key: key}}); now != nil || before != nil || err != nil {
			t.Errorf("deletion of nothing: %+v %+v %v", now, before, err)
		}
	}
	if _, ok := b.Get(ID{Policy: "login", Key: "bob"}); ok {
		t.Error("bob is still there")
	}
	if st := b.Stats(); st.Overrides != 2 || st.Deleted != 1 || !st.Durable || st.WritesFailed != 0 {
		t.Errorf("%+v", st)
	}
	again := mustOpen(t, name)
	if diff := cmp.Diff(contentOf(b), contentOf(again)); diff != "" || b.Digest() != again.Digest() || again.Stats().Overrides != 2 {
		t.Error(diff)
	}
	if e := set(t, again, "n0", "carol", `{"limit":1}`); e.Counter != 6 {
		t.Errorf("the counter went on at %d", e.Counter)
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if left, _ := os.ReadDir(filepath.Dir(name)); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

// TestUnwritable: what could not be written is not there, neither now nor after another start, and other members' entries are in
// force and written later.
func TestUnwritable(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "data")
	d, err := OpenDirectory(directory)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDirectory(directory); err == nil {
		t.Error("opened twice")
	}
	garbage := filepath.Join(directory, ".overrides.json-123")
	if err := os.WriteFile(garbage, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if d, err = OpenDirectory(directory); err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := os.Stat(garbage); err == nil {
		t.Error("what was left behind is there")
	}
	name := filepath.Join(directory, FileName)
	b := mustOpen(t, name)
	set(t, b, "n0", "alice", `{"limit":1}`)
	away := directory + "-away"
	if err := os.Rename(directory, away); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Change("n0", Entry{ID: ID{Policy: "login", Key: "bob"}, Settings: `{"limit":1}`, At: epoch}); err == nil {
		t.Error("a change was not refused")
	}
	if _, ok := b.Get(ID{Policy: "login", Key: "bob"}); ok || b.Stats().Overrides != 1 {
		t.Error("it is there all the same")
	}
	other := mustOpen(t, "")
	e := set(t, other, "n1", "carol", `{"limit":1}`)
	if n, err := b.Merge([]Entry{e}); n != 1 || err != nil {
		t.Errorf("merge: %d %v", n, err)
	}
	if _, ok := b.Get(e.ID); !ok || b.Durable() || b.Stats().WriteError == nil {
		t.Error("carol is not there, or said to be durable")
	}
	if err := b.Retry(); err == nil {
		t.Error("the file was written")
	}
	if err := os.Rename(away, directory); err != nil {
		t.Fatal(err)
	}
	if err := b.Retry(); err != nil || !b.Durable() {
		t.Errorf("retry: %v", err)
	}
	if diff := cmp.Diff(contentOf(b), contentOf(mustOpen(t, name))); diff != "" {
		t.Error(diff)
	}
	if _, err := OpenDirectory(filepath.Join(name, "x")); err == nil {
		t.Error("a directory in a file")
	}
	if other.Durable() {
		t.Error("a book without a file is durable")
	}
}

// TestMergeConverges: members that learn of the same changes in any order, any number of times and in any pages have the same entries:
// the newest of each override, also where a member that lost its file has used a version twice.
func TestMergeConverges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		var changes []Entry
		newest := make(map[ID]Entry)
		for range 1 + rng.IntN(40) {
			e := Entry{
				ID:      ID{Policy: fmt.Sprint("p", rng.IntN(2)), Key: fmt.Sprint("k", rng.IntN(4))},
				Version: Version{1 + rng.Uint64N(4), fmt.Sprint("n", rng.IntN(3))}, By: fmt.Sprint(rng.IntN(2)), At: time.UnixMilli(rng.Int64N(3)).UTC(),
			}
			if rng.IntN(2) == 0 {
				e.ID.Key, e.ID.Prefix = "", e.ID.Key
			}
			if rng.IntN(3) > 0 {
				e.Settings = fmt.Sprintf(`{"limit":%d}`, 1+rng.IntN(3))
			}
			changes = append(changes, e)
			if was, ok := newest[e.ID]; !ok || e.newer(&was) {
				newest[e.ID] = e
			}
		}
		var first *Book
		for range 3 {
			b := mustOpen(t, "")
			order := slices.Concat(changes, changes[:rng.IntN(len(changes)+1)])
			rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			for len(order) > 0 {
				n := 1 + rng.IntN(len(order))
				if _, err := b.Merge(order[:n]); err != nil {
					t.Fatal(err)
				}
				order = order[n:]
			}
			for _, e := range contentOf(b) {
				if e != newest[e.ID] {
					t.Fatalf("round %d: %+v, want %+v", round, e, newest[e.ID])
				}
			}
			if first == nil {
				first = b
			}
			if diff := cmp.Diff(contentOf(first), contentOf(b)); diff != "" || first.Digest() != b.Digest() || len(contentOf(b)) != len(newest) {
				t.Fatalf("round %d: %s", round, diff)
			}
		}
	}
}

// TestBounds: a book takes no more than it may, from operators and from members, and forgets the oldest deletions, the same on all members.
func TestBounds(t *testing.T) {
	b := mustOpen(t, "")
	entries := make([]Entry, 0, 3*MaxOverrides)
	for i := range 2*MaxOverrides + 5 {
		entries = append(entries, Entry{ID: ID{Policy: "login", Key: fmt.Sprint(i)}, Version: Version{uint64(i + 1), "n1"}, Settings: `{"limit":1}`, At: epoch})
	}
	if n, err := b.Merge(entries[:MaxOverrides]); n != MaxOverrides || err != nil {
		t.Fatalf("%d %v", n, err)
	}
	full := b.Digest()
	if _, _, err := b.Change("n0", Entry{ID: ID{Policy: "login", Key: "one more"}, Settings: `{"limit":1}`, At: epoch}); !errors.Is(err, ErrFull) || b.Digest() != full {
		t.Errorf("one more: %v", err)
	}
	set(t, b, "n0", "7", `{"limit":2}`) // in place of another
	if n, err := b.Merge(entries[MaxOverrides:]); n != MaxOverrides || !errors.Is(err, ErrFull) {
		t.Errorf("merged %d more, %v", n, err)
	}
	for i := range entries {
		entries[i].Settings, entries[i].Counter = "", entries[i].Counter+1<<20
	}
	reverse := mustOpen(t, "")
	if _, err := b.Merge(entries); err != nil {
		t.Fatal(err)
	}
	slices.Reverse(entries)
	for page := range slices.Chunk(entries, 999) {
		if _, err := reverse.Merge(page); err != nil {
			t.Fatal(err)
		}
	}
	if st := b.Stats(); st.Overrides != 0 || st.Deleted != MaxDeleted || b.Digest() != reverse.Digest() {
		t.Errorf("%+v %+v", st, reverse.Stats())
	}
	long := strings.Repeat("k", 1000)
	for i := range entries[:5000] {
		entries[i].Key = long + fmt.Sprint(i)
	}
	if _, err := b.Merge(entries[:5000]); err != nil || b.now.Load().deleted.bytes > MaxDeletedBytes {
		t.Errorf("%d bytes of deletions, %v", b.now.Load().deleted.bytes, err)
	}
	wide := mustOpen(t, "")
	for i := range entries[:5000] {
		entries[i].Settings = `{"x":"` + strings.Repeat("s", 4000) + `"}`
	}
	if _, err := wide.Merge(entries[:5000]); !errors.Is(err, ErrFull) || wide.Stats().Bytes > 2*MaxBytes || wide.Stats().Bytes < 2*MaxBytes-8000 {
		t.Errorf("%v with %+v", err, wide.Stats())
	}
}

// TestInvalidEntries: what another member sends and what is not an entry is left out, and the rest is taken.
func TestInvalidEntries(t *testing.T) {
	good := Entry{ID: ID{Policy: "login", Key: "k"}, Version: Version{1, "n"}, Settings: `{"limit":1}`, At: epoch}
	for field, change := range map[string]func(*Entry){
		"policy":   func(e *Entry) { e.Policy = "a b" },
		"key":      func(e *Entry) { e.Key = "" },
		"prefix":   func(e *Entry) { e.Prefix = "x" },
		"counter":  func(e *Entry) { e.Counter = 0 },
		"node":     func(e *Entry) { e.Node = "" },
		"by":       func(e *Entry) { e.By = "\xff" },
		"settings": func(e *Entry) { e.Settings = strings.Repeat("x", 4097) },
		"at":       func(e *Entry) { e.At = time.UnixMilli(-1) },
	} {
		bad := good
		change(&bad)
		b := mustOpen(t, "")
		if n, err := b.Merge([]Entry{bad, good}); n != 1 || err == nil || !strings.Contains(err.Error(), field+": ") {
			t.Errorf("%s: %d %v", field, n, err)
		}
	}
	for name, change := range map[string]func(*Entry){
		"key in Latin-1":    func(e *Entry) { e.Key = "\xe9" },
		"long key":          func(e *Entry) { e.Key = strings.Repeat("k", 1025) },
		"long prefix":       func(e *Entry) { e.Key, e.Prefix = "", strings.Repeat("k", 1025) },
		"counter at 2^63":   func(e *Entry) { e.Counter = 1 << 63 },
		"settings in bytes": func(e *Entry) { e.Settings = "\xff" },
		"year 10000":        func(e *Entry) { e.At = time.UnixMilli(maxMillis + 1) },
	} {
		bad := good
		change(&bad)
		if n, err := mustOpen(t, "").Merge([]Entry{bad}); n != 0 || err == nil {
			t.Errorf("%s: %d %v", name, n, err)
		}
	}
	b := mustOpen(t, "")
	good.Counter = maxCounter
	if _, err := b.Merge([]Entry{good}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Change("n", Entry{ID: ID{Policy: "login", Key: "k"}, Settings: `{"limit":2}`}); err == nil {
		t.Error("the counter went on beyond its end")
	}
}

// TestFileErrors: a file that is not a book's is an error that names the file and the line, and nothing of it is taken.
func TestFileErrors(t *testing.T) {
	const entry = `{"policy":"p","key":"k","settings":{"limit":1},"counter":1,"node":"n","at":"2026-01-01T00:00:00Z"}`
	for name, c := range map[string]struct{ content, want string }{
		"empty":           {"", ":1:1: "},
		"cut off":         {"{\"format\": 1, \"overrides\": [\n" + entry + ",\n{\"policy\":\"p", ":3:"},
		"another format":  {`{"format": 2, "overrides": []}`, "format: is 2"},
		"unknown field":   {`{"format": 1, "overrides": [], "x": 1}`, ":1:"},
		"zero bytes":      {strings.Repeat("\x00", 100), ":1:1: "},
		"twice":           {"{\"format\": 1, \"overrides\": [\n" + entry + ",\n" + entry + "\n]}", ":3:1: overrides[1]: key: "},
		"field twice":     {"{\"format\": 1, \"overrides\": [\n{\"policy\":\"p\",\"policy\":\"p\"}\n]}", ":2:"},
		"bad policy":      {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `"p"`, `"p p"`, 1) + "\n]}", ":2:1: overrides[0]: policy: "},
		"no object":       {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `{"limit":1}`, `7`, 1) + "\n]}", ":2:1: overrides[0]: settings: "},
		"neither":         {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `"settings":{"limit":1},`, ``, 1) + "\n]}", ":2:1: overrides[0]: settings: "},
		"both":            {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `"counter"`, `"deleted":true,"counter"`, 1) + "\n]}", ":2:1: overrides[0]: settings: "},
		"counter of text": {"{\"format\": 1, \"overrides\": [\n" + strings.Replace(entry, `:1,"node"`, `:"1","node"`, 1) + "\n]}", ":2:"},
	} {
		file := filepath.Join(t.TempDir(), FileName)
		if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := OpenBook(file)
		if err == nil || !strings.HasPrefix(err.Error(), file+":") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, err := OpenBook(t.TempDir()); err == nil {
		t.Error("a directory was read")
	}
}

// FuzzFile: any content is read without a panic, and what is read is written and read again as the same.
func FuzzFile(f *testing.F) {
	f.Add([]byte("{\"format\": 1, \"overrides\": [\n{\"policy\":\"p\",\"key\":\"k\",\"settings\":{\"limit\":1},\"counter\":1,\"node\":\"n\",\"at\":\"2026-01-01T00:00:00Z\"},\n{\"policy\":\"p\",\"prefix\":\"k\",\"deleted\":true,\"counter\":2,\"node\":\"n\",\"at\":\"2026-01-01T00:00:00+01:00\"}\n]}"))
	f.Add([]byte(`{"format":1,"overrides":[{"policy":"p","key":"\ud83d\ude00","settings":{"\u0061" : 1e3},"counter":9007199254740992,"node":"n","at":"1970-01-01T00:00:00.0005Z"}]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		entries, err := parse("f", content)
		if err != nil {
			return
		}
		b := mustOpen(t, "")
		for i := range entries {
			b.now.Load().put(&entries[i])
		}
		b.now.Load().sort()
		file := mustOpen(t, filepath.Join(t.TempDir(), FileName))
		if err := file.save(b.sorted()); err != nil {
			t.Fatal(err)
		}
		again := mustOpen(t, file.file.Name)
		written, err := os.ReadFile(file.file.Name)
		if err != nil {
			t.Fatal(err)
		}
		twice, err := parse("f", written)
		if err != nil || len(twice) != len(entries) || len(contentOf(again)) != len(entries) {
			t.Fatalf("%v: %d entries, then %d", err, len(entries), len(twice))
		}
		if err := again.save(again.sorted()); err != nil {
			t.Fatal(err)
		}
		if third, _ := os.ReadFile(file.file.Name); string(third) != string(written) {
			t.Errorf("%s\nthen\n%s", written, third)
		}
	})
}
