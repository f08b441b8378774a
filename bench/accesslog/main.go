// Command accesslog writes an access log in the combined format to standard output, for trying weir simulate:
//
//	go run ./accesslog -lines 10000000 > /tmp/access.log
//
// Requests come at random (a Poisson process), callers by a Zipf distribution. The same settings give the same log.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"time"
)

func main() {
	lines := flag.Int("lines", 1_000_000, "requests to write")
	rate := flag.Float64("rate", 2000, "requests a second, on the mean")
	callers := flag.Uint64("callers", 200_000, "different addresses at most")
	seed := flag.Uint64("seed", 1, "the same seed gives the same log")
	flag.Parse()
	if *lines < 0 || *rate <= 0 || *callers < 1 || *callers > 1<<24 {
		fmt.Fprintln(os.Stderr, "accesslog: -lines must not be negative, -rate must be above 0, -callers 1 to 16777216")
		os.Exit(2)
	}
	out := bufio.NewWriterSize(os.Stdout, 1<<20)
	r := rand.New(rand.NewPCG(*seed, 1))
	zipf := rand.NewZipf(r, 1.1, 8, *callers-1)
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at, last, stamp := 0.0, int64(-1), ""
	var line []byte
	for range *lines {
		at += r.ExpFloat64() / *rate
		if s := int64(at); s != last {
			last, stamp = s, start.Add(time.Duration(s)*time.Second).Format("02/Jan/2006:15:04:05 -0700")
		}
		n := zipf.Uint64()
		line = append(line[:0], "10."...)
		line = strconv.AppendUint(line, n>>16&255, 10)
		line = append(line, '.')
		line = strconv.AppendUint(line, n>>8&255, 10)
		line = append(line, '.')
		line = strconv.AppendUint(line, n&255, 10)
		line = append(line, " - - ["...)
		line = append(line, stamp...)
		line = append(line, "] \"GET /api/items/"...)
		line = strconv.AppendInt(line, int64(r.IntN(1000)), 10)
		line = append(line, " HTTP/1.1\" 200 512 \"-\" \"example/1.0\"\n"...)
		if _, err := out.Write(line); err != nil {
			fmt.Fprintln(os.Stderr, "accesslog:", err)
			os.Exit(2)
		}
	}
	if err := out.Flush(); err != nil {
		fmt.Fprintln(os.Stderr, "accesslog:", err)
		os.Exit(2)
	}
}
