package simulate

import (
	"bytes"
	"encoding/json"
	"regexp"
	"strings"
	"testing"
)

func report(t *testing.T) *Report {
	t.Helper()
	src := list{{1e9, []byte("</script><img src=x onerror=alert(1)>"), 1}, {2e9, []byte("</script><img src=x onerror=alert(1)>"), 1}, {2e9, []byte("b"), 9}}
	set := parse(t, "policies: [{name: one, algorithm: sliding_log, limit: 1, window: 1m}]")
	res, err := Run(t.Context(), Config{Source: &src, Policies: set.Policies(), Suggest: &Share{}})
	if err != nil {
		t.Fatal(err)
	}
	return &Report{Result: res, Input: "<b>in</b>", Malformed: 1, BadLines: []BadLine{{3, "is bad", `"<i>"`}}}
}

func TestTable(t *testing.T) {
	var out strings.Builder
	if err := report(t).WriteTable(&out); err != nil {
		t.Fatal(err)
	}
	const want = `<b>in</b>: 3 requests of 2 keys, 1970-01-01T00:00:01Z to 1970-01-01T00:00:02Z
malformed lines, left out: 1
  line 3 is bad: "<i>"

POLICY  ALGORITHM    LIMIT     ADMITTED  REFUSED     MOST IN A WINDOW  CALLERS TOUCHED  LONGEST WAIT  STATES  SMALLEST LIMIT
one     sliding_log  1 per 1m  1         2 (66.7 %)  1 in 1m0s         2 (100 %)        59s           16 KiB  9 (callers 0 %, requests 0 %)
`
	if out.String() != want {
		t.Errorf("%s", out.String())
	}
}

func TestJSONReport(t *testing.T) {
	var out bytes.Buffer
	if err := report(t).WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Events     int64
		Candidates []struct {
			Policy            string
			Admitted, Refused int64
			Impossible        int64
			Worst             struct{ Units int64 }
			Suggestion        struct{ Limit int64 }
		}
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v in %s", err, out.Bytes())
	}
	c := got.Candidates[0]
	if got.Events != 3 || c.Policy != "one" || c.Admitted != 1 || c.Refused != 2 || c.Impossible != 1 || c.Worst.Units != 1 || c.Suggestion.Limit != 9 {
		t.Errorf("%+v", got)
	}
}

// Keys are text wherever they stand, and the page loads nothing.
func TestHTMLReport(t *testing.T) {
	var out strings.Builder
	if err := report(t).WriteHTML(&out); err != nil {
		t.Fatal(err)
	}
	page := out.String()
	for _, bad := range []string{"<img", "<b>in", "<i>"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if n := strings.Count(page, "</script>"); n != 2 {
		t.Errorf("the page ends %d scripts, want 2", n)
	}
	if m := regexp.MustCompile(`(?i)(src|href)\s*=\s*["']?(https?:)?//|url\(|@import`).FindString(page); m != "" {
		t.Errorf("the page loads %q", m)
	}
	for _, want := range []string{"default-src 'none'", "66.7 %", "line 3 is bad", `id="one"`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}
