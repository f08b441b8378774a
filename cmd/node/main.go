// Command node is the weir command under another name.
package main

import "github.com/weirlimit/weir/internal/cli"

func main() { cli.Main() }
